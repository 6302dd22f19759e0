"""The status page: its server without a browser, and the page in a real one."""
