"""What frontend and engine say to each other: tables per release, differences, decoder, gRPC."""
