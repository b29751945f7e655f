"""A scripted model server.

It implements OpenAI's chat-completions protocol, but its answers come from rules, not from a model. With it, the whole
suite can run and be tested without an API key, a network or costs. The only model is called `pawl-scripted` and
identifies itself as rule-based. Without a script, the answers depend only on the messages (`rules`), so that they stay
the same across retries and restarts. With a script (`script`), the server can return anything, including broken
responses.

The server does not import any other part of Pawl except logging, so that tests run against an independent peer.
"""
