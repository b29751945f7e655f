"""The policy for calls: checks, rules, admission, rate limits and the audit chain."""
