"""What bench.sh runs: commands, rows, tables, pictures. Some programs run by themselves, too."""
