// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"io"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/perf/benchfmt"
)

// figure is a quantity that a part measured. It has more than one value if a benchmark ran
// repeatedly.
type figure struct {
	Name   string    `json:"name"`
	Unit   string    `json:"unit"`
	Values []float64 `json:"values"`
}

// figures collects figures in the order in which they first appear.
type figures struct {
	list  []figure
	index map[[2]string]int
}

func (f *figures) add(name, unit string, value float64) {
	key := [2]string{name, unit}
	i, ok := f.index[key]
	if !ok {
		if f.index == nil {
			f.index = map[[2]string]int{}
		}
		i = len(f.list)
		f.index[key] = i
		f.list = append(f.list, figure{Name: name, Unit: unit})
	}
	f.list[i].Values = append(f.list[i].Values, value)
}

// fuzzed matches the line of hack/fuzz about a fuzzer.
var fuzzed = regexp.MustCompile(`-fuzz=\^(\w+)\$.* execs: ([0-9]+)`)

// readFigures returns the figures in the output of a part: results of benchmarks, numbers
// that tests report with the method Attr of package testing, and executions of fuzzers. It
// also counts the tests in the output of "go test -v".
func readFigures(output io.Reader) ([]figure, error) {
	var all figures
	tests := map[string]float64{}
	reader := bufio.NewReader(output)
	for {
		line, err := reader.ReadString('\n')
		if fields := strings.Fields(line); len(fields) > 0 {
			switch {
			case strings.HasPrefix(line, "Benchmark"):
				// benchfmt changes lines such as ns/op to seconds, so that all figures have base units.
				r := benchfmt.NewReader(bytes.NewReader([]byte(strings.TrimRight(line, "\n")+"\n")), "")
				for r.Scan() {
					if result, ok := r.Result().(*benchfmt.Result); ok {
						for _, v := range result.Values {
							all.add(withoutProcessors(result.Name), v.Unit, v.Value)
						}
					}
				}
			case strings.HasPrefix(line, "=== ATTR") && len(fields) == 5:
				if value, err := strconv.ParseFloat(fields[4], 64); err == nil {
					all.add(fields[2], fields[3], value)
				}
			case fields[0] == "---" && len(fields) > 1:
				tests[strings.TrimSuffix(fields[1], ":")]++
			default:
				if m := fuzzed.FindStringSubmatch(line); m != nil {
					if value, err := strconv.ParseFloat(m[2], 64); err == nil {
						all.add(m[1], "executions", value)
					}
				}
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
	}
	for _, outcome := range []struct{ word, unit string }{{"PASS", "passed"}, {"FAIL", "failed"}, {"SKIP", "skipped"}} {
		if n := tests[outcome.word]; n > 0 {
			all.add("tests", outcome.unit, n)
		}
	}
	return all.list, nil
}

// withoutProcessors returns the name of a benchmark without the number of processors.
func withoutProcessors(name benchfmt.Name) string {
	base, parts := name.Parts()
	text := string(base)
	for _, part := range parts {
		if part[0] != '-' {
			text += string(part)
		}
	}
	return text
}
