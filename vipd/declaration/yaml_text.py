"""Values as readable YAML that every reader, vipd's own first, reads back unchanged. Pure."""

from __future__ import annotations

import yaml

from vipd.declaration.nodes import Scalar, other_meaning
from vipd.model.text import lines


class _Dumper(yaml.SafeDumper):
    """PyYAML's, but it quotes every text that might be something else, and writes no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        """Always true: a value that occurs twice is written twice."""
        del data
        return True


def _represented(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    plain = text.isprintable() and not other_meaning(Scalar(0, text, plain=True))
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _represented)


def dump_yaml(value: object) -> str:
    """A value of JSON types as YAML, keys in their order; unprintable characters are escaped."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None)
    # PyYAML leaves some such characters unchanged; they are in double quotes, as described above.
    return lines(text)
