"""A scripted model server: the OpenAI chat-completions protocol, answered by rules instead of a language model.

It lets the whole suite run, and be tested, without a key, a network or a bill. It is honest about what it is: its only
model is called `pawl-scripted`, and it says so when asked. Without a script it answers from the prompt (`rules`); a
script (`script`) can make it do anything else, broken things included. It remembers nothing between requests: an
answer follows from the messages it is sent, so a retry gets the same answer and a restart changes nothing.

It imports no other part of Pawl, because an independent peer is worth more to a test than a convenient one.
"""
