"""The map of keys for people who come from TRL: both columns name what exists."""

import ast
import importlib.util
import re
from pathlib import Path

from volley.job import JOB

PAGE = Path(__file__).parents[3] / "docs" / "coming-from.md"
ROWS = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\| `.*$", PAGE.read_text(), re.M)]


def keys(cell: str) -> list[str]:
    """The keys of one cell; `.name` continues the key before it."""
    found: list[str] = []
    for name in re.findall(r"`([^`]+)`", cell):
        plain = name.partition(":")[0]
        found.append(plain if not plain.startswith(".") else found[-1].rpartition(".")[0] + plain)
    return found


def job_keys(schema: dict[str, object], prefix: str = "") -> set[str]:
    """Every dotted key that a job file may have, without those of free mappings."""
    definitions = JOB.json_schema()["$defs"]

    def walk(node: dict[str, object], prefix: str, depth: int) -> set[str]:
        found: set[str] = set()
        for each in [node, *node.get("anyOf", []), *node.get("oneOf", [])]:  # type: ignore[misc]
            target = definitions.get(str(each.get("$ref", "")).rpartition("/")[2], each)
            for name, part in target.get("properties", {}).items():
                found.add(f"{prefix}{name}")
                if depth:
                    found |= walk(part, f"{prefix}{name}.", depth - 1)
        return found

    return walk(schema, prefix, 2)


def test_every_key_of_volley_exists() -> None:
    known = job_keys(JOB.json_schema()["$defs"]["RLJob"])
    named = {key for row in ROWS for key in keys(row[0])} - {"token_mean"}
    assert len(named) > 25
    assert named - known == set()


def test_every_name_of_trl_exists() -> None:
    from transformers import TrainingArguments

    spec = importlib.util.find_spec("trl")  # read, not imported: it warns of versions of vLLM
    assert spec is not None
    assert spec.origin is not None
    known = set(TrainingArguments.__dataclass_fields__)
    for name in ("grpo_config", "grpo_trainer"):
        tree = ast.parse((Path(spec.origin).parent / "trainer" / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                known.add(node.target.id)
            elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
                known |= {argument.arg for argument in node.args.args}
    named = {key for row in ROWS for key in keys(row[1]) if key not in ("dapo",)}
    assert len(named) > 20
    assert named - known == set()
