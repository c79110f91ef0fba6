"""Shows on standard error what a long call is doing: takes the phases that a call reports, and writes one line."""
