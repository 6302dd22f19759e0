"""The iptables dataplane: kube-proxy's chain architecture through iptables-restore. See README.md."""
