"""The pictures that commands draw with matplotlib."""
