"""Small MCP servers over stdio that work on real input: `python -m traces.mcp_servers.repo`, `.tickets`, `.tables`.

Their answers are plain text, bounded, the same for the same input, and free of absolute paths.
"""
