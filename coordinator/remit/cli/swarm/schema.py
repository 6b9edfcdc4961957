"""JSON Schema of swarm files, for editors that complete and check while one writes."""

from __future__ import annotations

from typing import Any

from remit.cli.swarm.model import SwarmFile

__all__ = ["json_schema"]

_EACH_SHORT_FORMS: list[dict[str, Any]] = [
    {"type": "string", "description": "Short for `glob`."},
    {"type": "array", "description": "Short for `list`."},
]


_POLICY_WORDS: dict[str, Any] = {
    "enum": ["ask", "auto", "deny"],
    "description": "Ask people, approve everything, deny everything.",
}


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12) of a swarm file.

    It holds for every file that loads. What one field says about another, such
    as names, cycles and the fields of a command, only loading can check.
    """
    schema = SwarmFile.model_json_schema(by_alias=True, mode="validation")
    definitions = schema["$defs"]
    definitions["JsonValue"]["description"] = "Any value."
    for one in (schema, *definitions.values()):
        for name, field in one.get("properties", {}).items():
            field["title"] = name
    # `lines`, `command` and `env` are taken as they are written, so plain numbers may stand there.
    scalar = {"type": ["string", "number", "boolean"]}
    for owner, name in (("AgentSpec", "command"), ("EachSpec", "lines")):
        _widen_items(definitions[owner]["properties"][name], scalar)
    definitions["AgentSpec"]["properties"]["env"]["anyOf"][0]["additionalProperties"] = scalar
    definitions["AgentSpec"]["oneOf"] = [{"required": ["command"]}, {"required": ["python"]}]
    definitions["EachSpec"]["oneOf"] = [{"required": [name]} for name in ("glob", "list", "lines")]
    definitions["RunSpec"]["properties"]["each"]["anyOf"][:0] = _EACH_SHORT_FORMS
    for properties in (schema["properties"], definitions["RunSpec"]["properties"]):
        rules = properties["approvals"]["anyOf"]
        rules[0]["minItems"] = 1
        rules.insert(0, _POLICY_WORDS)
    schema["properties"]["runs"]["minItems"] = 1
    schema["patternProperties"] = {"^x-": {"description": "Anything: a place for what YAML aliases refer to."}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "remit swarm file"}


def _widen_items(field: dict[str, Any], items: dict[str, Any]) -> None:
    """Let the lists of a field hold other items, however deep the alternatives are nested."""
    if field.get("type") == "array":
        field["items"] = items
    for below in field.get("anyOf", []):
        _widen_items(below, items)
