"""Tool-call formats, one small file each, and the choice of one by chat template."""

from grammar.formats.base import ToolFormat
from grammar.formats.registry import format_for, format_named

__all__ = ["ToolFormat", "format_for", "format_named"]
