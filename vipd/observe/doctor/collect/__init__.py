"""Looking at the host: files, programs and netlink in, `facts` out. The only part of doctor that touches
anything, and it only reads."""
