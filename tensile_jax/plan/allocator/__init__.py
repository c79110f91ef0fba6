"""Takes a plan's instructions and sizes, gives the bytes that the device's allocator has in use while the plan runs."""
