"""What a model wrote, taken apart: reasoning, text and tool calls, as the text arrives."""
