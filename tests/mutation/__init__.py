"""Mutation testing: plants random faults in the services and counts how many the tests find.

`python -m tests.mutation record FOLDER` runs the tests with branch coverage and records which test ran which line.
`python -m tests.mutation run FOLDER` plants faults in covered lines and runs the tests that cover each line. Use a
separate clone, because the faults are written into its files. Its environment needs coverage.
"""
