"""Parsers of generated text: reasoning and tool calls, for streams and complete texts."""
