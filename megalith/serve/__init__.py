"""HTTP server with the OpenAI API: an HTTP process without torch, and an engine process."""
