"""Print the table of steps.py."""

from benchmarks.flow import steps

if __name__ == "__main__":
    print(steps.run()[0])
