"""The Python face of the package: certify, predict, attack and train, on modules, arrays and names."""
