"""What every room may use: errors, settings, registries, files, plug-ins, progress, devices."""
