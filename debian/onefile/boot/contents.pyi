"""What the builder writes into the file about itself."""

VERSION: str
"""Version of vipd."""
DIGEST: str
"""Sixteen hexadecimal digits that change with any byte of the contents."""
SUITS: str
"""For people: the Pythons and machines that the file is for."""
PARTS: dict[str, str]
"""The part for an interpreter, such as cp311_x86_64, by the ending of its extension modules."""
SHA256: dict[str, str]
"""Checksum of each packed part, by its name in the file."""
MEGABYTES: int
"""Free space that unpacking needs, rounded up."""
