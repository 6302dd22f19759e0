"""Text to a `Declaration`: services and every problem at once, from vipd/v1 and Kubernetes objects; and back.

A *value* is what a text has in one place: None, a boolean, an integer, text, a list, a mapping; `yaml_text`
reads it. A *path* is the way to it: the number of its document, then keys and indexes. A *kind* says which
values are possible in a place (`values`), a *key* what they mean there, and `service` is the table of all
keys: the definition of the language. A *fault* is what is wrong at a path; a *problem* has file and line too.
`rules` are about several keys of a service, `conflicts` about several services.

Pure. Imports `model`; every other package may import it. `reader.parse_declaration` is the way in,
`writer.format_declaration` the way out, `conversion` reads other programs' configurations.
"""
