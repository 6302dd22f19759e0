"""Every form of rule, map and chain in one table, for the kernel and the evaluator to disagree about."""

from __future__ import annotations

FORMS = """
ip saddr 192.168.5.5
ip saddr != 192.168.5.5
ip saddr 192.168.0.0/16
ip saddr 192.168.5.1-192.168.5.9
ip saddr { 10.0.0.0/8, 192.168.5.5 }
ip saddr != { 10.0.0.0/8 }
ip saddr & 255.255.0.0 == 192.168.0.0
ip saddr & 255.255.255.0 . ip daddr . meta l4proto . th dport @limits
ip daddr . meta l4proto . th dport @sockets
ip daddr . th dport @boxes
ip saddr . th dport @boxes
ip daddr @ranges
ip saddr @ranges
ip daddr != @ranges
meta l4proto udp
meta l4proto != udp
meta l4proto { tcp, udp }
meta l4proto 6
udp dport 53
udp dport { 52, 54-60 }
tcp dport 53
th dport 50-60
udp sport > 1024
udp dport < 53
udp dport >= 53
udp dport <= 52
fib saddr type local
fib saddr type != local
fib daddr type local
icmp type echo-request
ct original ip daddr 10.96.0.9
ct original ip saddr 192.168.5.5
meta l4proto udp ct original proto-dst 53
meta mark 0
meta mark & 0x4000 == 0x4000
meta mark set meta mark | 0x4002
meta mark & 0x4000 == 0x4000
meta mark set meta mark ^ 0x4000
meta mark & 0x4000 != 0x4000
meta mark set meta mark & 0x1
meta mark 0x0
ct mark & 0x2000 != 0x2000
ct mark set ct mark | 0x2000
ct mark & 0x2000 == 0x2000
meta mark set ip saddr map @marks
meta mark set ip daddr map @marks
meta mark 3
meta mark set 7 ip saddr 1.2.3.4
meta mark 7
update @learnt { ip saddr timeout 1m : meta mark }
meta mark set 9
update @learnt { ip saddr timeout 1m : meta mark }
add @learnt { ip saddr timeout 1m : meta mark }
meta mark set ip saddr map @learnt
meta mark 7
delete @learnt { ip saddr : meta mark }
meta mark set ip saddr map @learnt
delete @learnt { ip saddr : meta mark }
update @seen { ip saddr . ip daddr timeout 60s }
ip saddr . ip daddr @seen
ip daddr . ip saddr @seen
ip daddr set 0.0.0.5
ip daddr 0.0.0.0/8
ct original ip daddr 10.96.0.9
ip daddr set numgen inc mod 1 offset 65536
ip daddr 0.1.0.0
ip daddr set numgen random mod 1
ip daddr 0.0.0.0
ip daddr set jhash ct original ip saddr mod 4093 seed 0x76697064
ip daddr . meta l4proto @hashed
ip daddr set ip daddr . th dport map @there
ip daddr set ct original ip daddr . th dport map @there
ip daddr 10.96.0.9
ip saddr set ip daddr map @nowhere ip daddr set 1.2.3.4
ip saddr 0.0.0.77
ip daddr 1.2.3.4
ip saddr set ct original ip saddr
ip saddr 192.168.5.5
""".strip().splitlines()
"""Each is a rule that counts; what one has changed the next ones meet."""

TABLE = """
table ip forms {{
	set limits {{
		type ipv4_addr . ipv4_addr . inet_proto . inet_service
		elements = {{ 192.168.5.0 . 10.96.0.9 . udp . 53, 192.168.100.0 . 10.96.0.9 . tcp . 53 }}
	}}
	set sockets {{
		type ipv4_addr . inet_proto . inet_service
		elements = {{ 10.96.0.9 . udp . 53 }}
	}}
	set boxes {{
		type ipv4_addr . inet_service
		flags interval
		elements = {{ 10.0.0.0/8 . 50-60, 192.168.0.0/16 . 54-60 }}
	}}
	set ranges {{
		type ipv4_addr
		flags interval
		elements = {{ 10.96.0.0/16, 172.16.0.1-172.16.0.9, 10.99.0.1 }}
	}}
	map marks {{
		type ipv4_addr : mark
		elements = {{ 192.168.5.5 : 3, 192.168.100.1 : 0x4 }}
	}}
	map learnt {{
		type ipv4_addr : mark
		size 100
		flags dynamic,timeout
	}}
	set seen {{
		type ipv4_addr . ipv4_addr
		size 100
		flags dynamic,timeout
	}}
	set hashed {{
		type ipv4_addr . inet_proto
		elements = {{ {hashed} . udp }}
	}}
	map there {{
		type ipv4_addr . inet_service : ipv4_addr
		elements = {{ 10.96.0.9 . 53 : 10.96.0.9 }}
	}}
	map nowhere {{
		type ipv4_addr : ipv4_addr
		elements = {{ 10.96.0.9 : 0.0.0.77 }}
	}}
	map ways {{
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = {{ 10.96.0.9 . udp . 53 : jump first, 10.96.0.8 . udp . 53 : drop }}
	}}
	map endpoints {{
		type inet_service : ipv4_addr . inet_service
		elements = {{ 53 : 10.244.1.10 . 5353 }}
	}}
	chain prerouting {{
		type nat hook prerouting priority dstnat; policy accept;
		jump dispatch
		counter comment "not after dnat"
	}}
	chain output {{
		type nat hook output priority -100; policy accept;
		jump dispatch
	}}
	chain dispatch {{
{forms}
		ct original ip daddr . meta l4proto . th dport vmap @ways
		counter comment "after a return"
		counter jump fourth comment "to a goto"
		counter comment "after a goto"
		meta l4proto vmap {{ tcp : drop, udp : goto second }}
		counter comment "not after a goto"
	}}
	chain first {{
		counter comment "first"
		ip saddr 1.1.1.1 counter drop comment "not dropped"
		counter continue comment "on"
		counter return comment "back"
		counter comment "not after a return"
	}}
	chain second {{
		counter jump third comment "second"
		counter comment "after third"
		counter reject with tcp reset comment "not tcp"
		meta l4proto udp ip saddr 192.168.5.5 counter dnat ip to th dport map @endpoints comment "by a map"
		meta l4proto udp counter dnat to 10.244.1.10:5353 comment "plainly"
		counter drop comment "not after dnat"
	}}
	chain fourth {{
		counter goto third comment "on to a chain that ends"
		counter comment "not behind a goto"
	}}
	chain third {{
		ip saddr 1.1.1.1 counter accept comment "not accepted"
	}}
	chain input {{
		type nat hook input priority 100; policy accept;
		counter comment "in"
	}}
	chain postrouting {{
		type nat hook postrouting priority srcnat - 1; policy accept;
		ct mark & 0x2000 != 0x2000 counter return comment "not ours"
		ip daddr . th dport {{ 10.244.1.10 . 5353 }} counter comment "translated"
		ip saddr . ip daddr {{ 1.1.1.1 . 1.1.1.1 }} counter comment "not hairpin"
		meta mark 9 counter meta mark set 1 masquerade fully-random comment "masqueraded"
		counter comment "unmarked"
	}}
	chain later {{
		type nat hook postrouting priority 110; policy accept;
		counter comment "only where nothing was masqueraded"
	}}
	chain forward {{
		type filter hook forward priority filter; policy accept;
		counter comment "forwarded"
	}}
}}
"""
