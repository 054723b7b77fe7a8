"""Print the table of all_reduce.py."""

from benchmarks.exchange import all_reduce

if __name__ == "__main__":
    print(all_reduce.run()[0])
