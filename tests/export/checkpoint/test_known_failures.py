"""The table of known failures is the one that the documentation shows."""

from samples import ROOT

from quant.export.checkpoint.configs.known_failures import FAILURES


def test_the_documentation_shows_every_failure() -> None:
    lines = (ROOT / "docs" / "vllm.md").read_text().splitlines()
    start = lines.index("## Known failures")
    shown = [line for line in lines[start : lines.index("", start + 5)] if line.startswith("| ")][1:]
    assert shown == [failure.row() for failure in FAILURES.values()]


def test_releases_are_a_span_or_one() -> None:
    assert FAILURES["rotation"].releases == "vLLM 0.26" and FAILURES["mxfp6"].releases == "vLLM 0.26 to 0.29"
