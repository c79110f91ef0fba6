"""Shows on standard error what a call that takes long is doing: takes phases as they are told, gives one line."""
