"""Turns forwardings into kernel rules. One package for each dataplane, behind the protocol in `base`."""
