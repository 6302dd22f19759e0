"""Turning forwardings into kernel rules. One room per dataplane behind the protocol in `base`."""
