"""A scripted model server: the OpenAI chat-completions protocol, answered by rules instead of a language model.

It lets the whole suite run and be tested without an API key, a network or a bill. Its only model is called
`pawl-scripted` and identifies itself as rule-based. Without a script it answers from the prompt (`rules`); a script
(`script`) can make it return anything, including broken responses. It keeps no state between requests: the same
messages always get the same answer, across retries and restarts.

It imports no other part of Pawl, so that tests run against an independent peer.
"""
