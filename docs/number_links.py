"""Links of docs/*.md and README.md to functions and classes lead to their lines.

    python docs/number_links.py            # write the numbers
    python docs/number_links.py --check    # write nothing, and say which are wrong

Exit status 1, and a line for each, if some are wrong, or name what is not there.

A link such as [`Bucket.put`](../ddp.py#L196) names what it leads to. Of several names the first one
decides. In a table of lines to break, [ddp.py](../ddp.py#L460) `a piece of code`, a link leads to
the one line that has this code. Any other link whose text is the name of a file has no number.
"""

import argparse
import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent  # of the project
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
LINK = re.compile(r"\[(?P<text>[^]]+)\]\((?P<file>[\w./]+\.py)(?:#L\d+)?\)")
BREAK = re.compile(r"\| " + LINK.pattern + r" `(?P<code>[^`]+)` \| `")
NAME = re.compile(r"`([\w.]+)`")


def definitions(text):
    """{name, such as "Bucket.put": its line} of the functions, methods and classes in a program."""
    lines = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            lines[node.name] = node.lineno
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    lines[f"{node.name}.{method.name}"] = method.lineno
    return lines


def line_of_code(text, code):
    """The line of a program that has this code. Raises ValueError unless it is one."""
    numbers = [i for i, line in enumerate(text.splitlines(), start=1) if code in line]
    if len(numbers) != 1:
        raise ValueError(f"{len(numbers)} lines have `{code}`")
    return numbers[0]


def line_of_name(text, name):
    """The line of a program on which this name is defined. Raises ValueError if none is."""
    lines = definitions(text)
    if name not in lines:
        raise ValueError(f"there is no `{name}`")
    return lines[name]


def line_of_link(link, code, program):
    """Where a link leads: a line of program, its text, or None. code: what its row breaks, or None.
    """
    if code is not None:
        return line_of_code(program, code)
    name = NAME.match(link["text"])
    if name is None or name[1].endswith(".py"):
        return None
    return line_of_name(program, name[1])


def numbered(line, folder):
    """(a line of a page with the right numbers, [faults in words]). folder: of the page."""
    row = BREAK.match(line)
    faults = []

    def replace(link):
        path = folder / link["file"]
        is_of_break = row is not None and link.start("text") == row.start("text")
        code = row["code"] if is_of_break else None
        try:
            number = line_of_link(link, code, path.read_text())
        except (OSError, ValueError, SyntaxError) as error:
            faults.append(f"{link[0]}: {error}")
            return link[0]
        end = "" if number is None else f"#L{number}"
        right = f"[{link['text']}]({link['file']}{end})"
        if right != link[0]:
            faults.append(f"{link[0]} should be {right}")
        return right

    return LINK.sub(replace, line), faults


def check_page(path):
    """(the text of a page with the right numbers, {number of a line: faults}). Blocks of code are
    left alone."""
    lines, faults = [], {}
    is_code = False
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.lstrip().startswith(("```", "~~~")):
            is_code = not is_code
        elif not is_code:
            line, of_line = numbered(line, path.parent)
            if of_line:
                faults[number] = of_line
        lines.append(line)
    return "\n".join(lines) + "\n", faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="say what is wrong, write nothing")
    parser.add_argument("pages", nargs="*", type=pathlib.Path, default=PAGES)
    options = parser.parse_args()
    is_wrong = False
    for path in options.pages:
        text, faults = check_page(path)
        if not options.check:
            path.write_text(text)
            _, faults = check_page(path)  # what cannot be mended
        for number, of_line in faults.items():
            is_wrong = True
            for fault in of_line:
                print(f"{path.name}:{number}: {fault}")
    if not is_wrong:
        print(f"the links of {', '.join(path.name for path in options.pages)} lead to their lines")
    sys.exit(1 if is_wrong else 0)


if __name__ == "__main__":
    main()
