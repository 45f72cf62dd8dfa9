"""KV blocks below the device, in host memory and on disk: when they are loaded and stored."""
