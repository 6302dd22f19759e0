"""The program as one file: built once, and used as somebody would who has only copied it to a host."""
