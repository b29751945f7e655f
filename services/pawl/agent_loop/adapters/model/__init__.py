"""A model server that speaks the OpenAI chat-completions protocol, over HTTP."""
