"""The pictures of README.md: a packet's way, and a recording of the first minute.

`python -m tests.docs.pictures` draws both into docs/pictures/; `--record`, as root, runs the first minute
anew before.

packet_path     draws the way of a packet
session         runs the first minute in network namespaces
cast            a recording as a file (asciicast v2), and the rows of the terminal that it shows
terminal        draws a recording as an animation
svg             what both drawings are made of
"""
