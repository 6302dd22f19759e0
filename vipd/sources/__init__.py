"""Where declarations come from. Each source offers units (see `vipd.control.catalog`) and tells when they change."""
