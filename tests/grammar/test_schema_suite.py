"""The JSON-Schema-Test-Suite: what counts as enforced lets nothing invalid through, and no keyword is silently given up."""

from pathlib import Path

import pytest
import torch

from grammar.bench.suite import run_suite
from grammar.compiler import GrammarCompiler

SUITE = Path(__file__).parents[3] / "shared" / "data" / "tool_schemas" / "json_schema_test_suite"
NEVER_ENFORCED = (
    *("not", "contains", "minContains", "maxContains", "if-then-else", "uniqueItems", "dependentRequired", "dependentSchemas"),
    *("unevaluatedItems", "unevaluatedProperties", "dependencies"),
)
ALWAYS_ENFORCED = ("type", "enum", "const", "required", "minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum")


@pytest.mark.parametrize("draft", ["draft2020-12", "draft7"])
def test_no_invalid_instance_passes_what_counts_as_enforced(tiny_checkpoint, draft):
    if not SUITE.is_dir():
        pytest.skip("The JSON-Schema-Test-Suite is not on this machine (../shared/data/tool_schemas/json_schema_test_suite).")
    torch.set_num_threads(1)
    compiler = GrammarCompiler(tiny_checkpoint("llama") / "tokenizer.json", 320, (2,))
    try:
        rows = {row.keyword: row for row in run_suite(SUITE / draft, compiler)}
    finally:
        compiler.close()
    assert {keyword: row.leaks for keyword, row in rows.items() if row.leaks} == {}
    assert sum(row.invalid for row in rows.values()) > 200
    assert sum(row.enforced for row in rows.values()) > 150
    for keyword in NEVER_ENFORCED:
        assert rows[keyword].enforced == 0 if keyword in rows else True, keyword
    for keyword in ALWAYS_ENFORCED:
        assert rows[keyword].checked == 0, keyword
        assert rows[keyword].enforced > 0
