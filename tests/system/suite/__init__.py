"""Tests with all processes of a suite."""
