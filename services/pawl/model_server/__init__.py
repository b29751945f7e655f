"""A scripted model server. It speaks OpenAI's chat-completions protocol, but rules instead of a model give the answers.

With it, the whole suite can run and be tested without an API key, a network or a bill. Its only model is called
`pawl-scripted` and identifies itself as rule-based. Without a script, its answers depend only on the messages
(`rules`), so they stay the same across retries and restarts. A script (`script`) can make it return anything, including
broken responses.

It imports no other part of Pawl except logging, so that tests run against an independent peer.
"""
