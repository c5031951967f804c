"""HTTP server with the OpenAI API: an HTTP process without torch, and engine processes."""
