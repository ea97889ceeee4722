"""What bench.sh runs: its tables, its pictures, and programs that also run by themselves."""
