from typing import Any

def fold(
    p: int, m: int, v: int, start: int, length: int, steps: Any, fused: int, root: int, /
) -> None: ...
