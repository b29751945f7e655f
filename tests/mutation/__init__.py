"""Random faults planted in the services: how many of them the tests find.

`python -m tests.mutation record FOLDER` runs the tests with branch coverage and notes which test ran which line;
`python -m tests.mutation run FOLDER` plants faults in covered lines and runs the tests of each line. Run both in a
clone of their own: the faults are written into its files, and coverage must be installed in its environment.
"""
