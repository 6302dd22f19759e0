"""Reading declarations: text in, a `Declaration` of services and every problem at once out. Pure."""
