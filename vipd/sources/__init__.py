"""Where declarations come from. Each offers units (`vipd.declaration.unit`) and says when they change."""
