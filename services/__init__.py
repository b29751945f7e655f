"""The services of Pawl, and what they share: the errors and the chassis."""
