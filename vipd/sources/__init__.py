"""Where declarations come from. Each source offers units (see `vipd.catalog`) and tells when they change."""
