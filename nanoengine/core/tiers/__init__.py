"""KV blocks below the device, in host memory and on disk: what is loaded and stored when."""
