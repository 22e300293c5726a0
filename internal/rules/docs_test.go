// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// docPages returns the text of each page of documentation, by its path from the root.
func docPages(t *testing.T) map[string]string {
	t.Helper()
	pages := map[string]string{}
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md", "examples/*/README.md"} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			pages[filepath.ToSlash(name)] = string(text)
		}
	}
	return pages
}

// words returns a text with one space between words.
func words(text string) string { return strings.Join(strings.Fields(text), " ") }

// numbers has sentences of the documentation that contain a number. Each entry also has
// the code or the page of measurements that contains the same number.
var numbers = []struct{ page, sentence, file, code string }{
	{"README.md", "| 1.06 s | 18.9 s |", "docs/history/benchmarks.md", "| start to programmed | 0.16 : 0.86 s | 1.06 : 18.9 s |"},
	{"README.md", "| 0.4 ms | 512 ms |", "docs/history/benchmarks.md", "| watch to kernel, least, median | 0.5 : 21 ms | 0.4 : 512 ms |"},
	{"README.md", "| 1.0 s | 35 s |", "docs/history/benchmarks.md", "| CPU time for 1,000 changes, default | 0.90 : 4.2 s | 1.0 : 35 s |"},
	{"README.md", "| 119 MB | 347 MB |", "docs/history/benchmarks.md", "| peak resident memory | 50 : 94 MB | 119 : 347 MB |"},
	{"README.md", "```sh hack/test ```", ".ci/run", `"$checkout/kpng/hack/test"`},
	{"docs/design.md", "more than 16 plus 1/64 of it", "internal/revstore/log.go", "return 16 + len(l.entries)/64"},
	{"docs/design.md", "for at most ten minutes, and at most 100,000 are kept", "internal/revstore/store.go", "tombstones: 100_000, tombstoneAge: 10 * time.Minute"},
	{"docs/design.md", "lags by more than 10,000 changes and a quarter of the store", "internal/revstore/store.go", "lag: 10_000"},
	{"docs/design.md", "the answer to a request, or five seconds have passed", "watcher/kube/selection.go", "labelledWithin = 5 * time.Second"},
	{"docs/design.md", "wait for ten minutes at most", "reconcile/reconcile.go", "waitLimit = 10 * time.Minute"},
	{"docs/design.md", "Only 32 begin at once", "remote/beginning.go", "maxTurns = 32"},
	{"docs/design.md", "pauses four times as long", "internal/conntrack/reconciler.go", "pauseFactor = 4"},
	{"docs/design.md", "For 25 seconds, it also deletes", "internal/conntrack/late.go", "maxLateWait = 13 * time.Second"},
	{"docs/design.md", "deletes the entry 20 ms later", "internal/conntrack/reset.go", "linger = 20 * time.Millisecond"},
	{"docs/design.md", "gets four segments in 1.1 seconds", "internal/conntrack/reset.go", "{150 * time.Millisecond, 400 * time.Millisecond, 550 * time.Millisecond, 550 * time.Millisecond}"},
	{"docs/design.md", "at most 1,024 connections are in work and 65,536 wait, 256 and 16,384 of one destination", "internal/conntrack/reset.go", "maxWaiting, maxWaitingOf = 64 << 10, 16 << 10"},
	{"docs/design.md", "at most 1,024 connections are in work and 65,536 wait, 256 and 16,384 of one destination", "internal/conntrack/reset.go", "maxInWork, maxInWorkOf = 1024, 256"},
	{"docs/design.md", "Above 20,000 slots, passes", "backends/nftables/pass.go", "maxDumped = 20_000"},
	{"docs/design.md", "ten minutes without kpng", "backends/ebpf/backend.go", "patience = 10 * time.Minute"},
	{"docs/design.md", "2,048 entries for up to 16 endpoints, and 65,536 for more", "maglev/maglev.go", "smallBits, largeBits = 11, 16"},
	{"docs/design.md", "2,048 entries for up to 16 endpoints, and 65,536 for more", "maglev/maglev.go", "maxSmall, minFree = 16, 128"},
	{"docs/reference/semantics.md", "More than 4096 refused ranges are an error", "internal/parameters/parameters.go", "maxDenied = 4096"},
	{"docs/design.md", "*Large services* (size 4096 or more)", "internal/updates/updates.go", "LargeSize = 4096"},
	{"docs/reference/semantics.md", "one million by default", "internal/elements/elements.go", "DefaultMax = 1_000_000"},
	{"docs/reference/semantics.md", "at most 512 bytes of one object", "cluster/refused.go", "maxInvalid = 512"},
	{"docs/reference/wire.md", "by default on `tcp://127.0.0.1:12090`", "internal/transport/address.go", `DefaultAddress = "tcp://127.0.0.1:12090"`},
	{"docs/reference/wire.md", "lags by more than 10,000 changes and by more than a quarter of all services", "internal/revstore/store.go", "lag: 10_000"},
	{"docs/reference/wire.md", "If it exceeds 1 MB, Sets of further endpoints follow", "remote/wireview.go", "maxWhole = 1 << 20"},
	{"docs/reference/wire.md", "after 15 s without a message", "internal/transport/dial.go", "firstMessage = 15 * time.Second"},
	{"docs/reference/wire.md", "lost its own source more than three minutes ago", "remote/client.go", "staleAfter = 3 * time.Minute"},
	{"docs/reference/wire.md", "lost its own source more than three minutes ago", "watcher/kube/errors.go", "staleAfter = 3 * time.Minute"},
	{"docs/reference/wire.md", "exceeds 3 MB, the server leaves out", "remote/wireview.go", "maxObject = 3 << 20"},
	{"docs/reference/wire.md", "more than 5,000 lost claims", "remote/wireview.go", "maxLost = 5000"},
	{"docs/reference/wire.md", "it remembers up to 100,000, for 10 minutes", "internal/revstore/store.go", "tombstones: 100_000, tombstoneAge: 10 * time.Minute"},
	{"docs/reference/wire.md", "after five to six minutes, or after 1,000 changes", "remote/stream.go", "renewTokens = 5 * time.Minute"},
	{"docs/reference/wire.md", "after five to six minutes, or after 1,000 changes", "remote/watch.go", "staleToken = 1000"},
	{"docs/reference/wire.md", "of at most 4 MB unpacked", "remote/answer.go", "maxUnpacked = 4 << 20"},
	{"docs/reference/wire.md", "the first eight bytes of the SHA-256 of the salt", "remote/digest.go", "bucketDigest = 8"},
	{"docs/reference/wire.md", "The salt has 16 random bytes", "remote/digest.go", "saltSize = 16"},
	{"docs/reference/wire.md", "lets 32 clients begin at the same time, and 8 of one peer", "remote/beginning.go", "maxTurns = 32"},
	{"docs/reference/wire.md", "lets 32 clients begin at the same time, and 8 of one peer", "remote/beginning.go", "maxTurnsPerPeer = maxTurns / 4"},
	{"docs/reference/wire.md", "If one needs more than 5 s, another may begin", "remote/beginning.go", "maxTurn = 5 * time.Second"},
	{"docs/reference/wire.md", "gets an empty OpItem every 5 s", "remote/beginning.go", "noticeInterval = 5 * time.Second"},
	{"docs/reference/wire.md", "| 16 KB; up to 64 KB of unread messages |", "remote/server.go", "maxRequest = 16 << 10"},
	{"docs/reference/wire.md", "| 16 KB; up to 64 KB of unread messages |", "remote/server.go", "requestWindow = 64 << 10"},
	{"docs/reference/wire.md", "connections of an IP address | 256 |", "internal/transport/server.go", "DefaultMaxConnectionsPerPeer = 256"},
	{"docs/reference/wire.md", "32 at a time, 20 new ones per second in the long run", "internal/transport/server.go", "DefaultMaxStreamsPerPeer = 32"},
	{"docs/reference/wire.md", "32 at a time, 20 new ones per second in the long run", "internal/transport/server.go", "DefaultStreamRate = 20.0"},
	{"docs/reference/wire.md", "| time for one message | 30 s", "internal/transport/server.go", "DefaultSendTimeout = 30 * time.Second"},
	{"docs/reference/wire.md", "half an hour (`--connection-age`)", "internal/transport/server.go", "DefaultConnectionAge = 30 * time.Minute"},
	{"docs/reference/json.md", "no progress for two minutes", "health/health.go", "stuckAfter = 2 * time.Minute"},
	{"docs/reference/json.md", "lost its connection more than three minutes ago", "watcher/kube/errors.go", "staleAfter = 3 * time.Minute"},
	{"docs/reference/json.md", "at most 20 services with the same kind", "internal/statuspage/report.go", "maxNamed = 20"},
	{"docs/reference/json.md", "| clients.slowest[] | object | at most 50", "internal/statuspage/report.go", "maxClients = 50"},
	{"docs/reference/json.md", "| changes[] | object | at most 50", "internal/statuspage/report.go", "maxChanges = 50"},
	{"docs/reference/json.md", "| services[] | object | at most 1,000", "internal/statuspage/query.go", "maxServices = 1000"},
	{"docs/reference/json.md", "the last 256 changes", "internal/revstore/store.go", "maxCommits = 256"},
	{"docs/reference/json.md", "the error, at most 4 KB", "sink/brief.go", "maxErrorText = 4096"},
	{"docs/reference/json.md", "the first 100, in the order of delivery", "sink/status.go", "maxPendingListed = 100"},
	{"docs/build/embedding.md", "no progress for about eight seconds", "sink/call.go", "hangAfter = 8 * time.Second"},
	{"docs/operate/nftables.md", "more than 4,096 slots", "backends/nftables/numbered.go", "minWeightedSlots = 4096"},
	{"docs/operate/nftables.md", "the first 4,095 endpoints of a list", "backends/nftables/number.go", "endpointMask = 0xfff"},
	{"docs/operate/security.md", "10 services of a sync, 4 KB of an error", "sink/status.go", "maxLogged = 10"},
	{"docs/operate/security.md", "10 services of a sync, 4 KB of an error", "sink/brief.go", "maxErrorText = 4096"},
	{"docs/operate/nftables.md", "above two minutes are rounded up to five seconds, and those above ten minutes to full minutes", "backends/nftables/affinity.go", "{{120, 1}, {600, 5}, {86400, 60}}"},
	{"docs/operate/security.md", "10 problems of an object", "watcher/watcher.go", "maxProblems = 10"},
	{"docs/operate/security.md", "4,096 connections", "internal/healthcheck/server.go", "maxConnections = 4096"},
	{"docs/operate/userspace.md", "4,096 (`--max-listeners`)", "backends/userspace/options.go", "cmp.Or(s.MaxListeners, 4096)"},
	{"docs/operate/userspace.md", "8,192 (`--max-udp-clients`)", "backends/userspace/options.go", "cmp.Or(s.MaxUDPClients, 8192)"},
	{"docs/operate/windows.md", "1,024 load balancers", "backends/windows/kernelspace/options.go", "cmp.Or(o.MaxLoadBalancers, 1024)"},
	{"docs/operate/ebpf.md", "*After ten minutes without kpng*", "backends/ebpf/backend.go", "patience = 10 * time.Minute"},
	{"docs/operate/observe.md", "no change has waited for two minutes without progress", "health/health.go", "stuckAfter = 2 * time.Minute"},
	{"docs/operate/observe.md", "At 100 MB a new file begins", "internal/command/execute.go", "openLogFile(string(h.logFile), 100<<20)"},
	{"docs/operate/run.md", "had no source for three minutes", "remote/client.go", "staleAfter = 3 * time.Minute"},
	{"docs/operate/observe.md", "1 after three minutes without a connection to the source", "watcher/kube/errors.go", "staleAfter = 3 * time.Minute"},
	{"docs/operate/iptables.md", "Every five seconds, or less often", "backends/iptables/backend.go", "minPause = 5 * time.Second"},
	{"docs/operate/ipvs.md", "everything every ten seconds", "backends/ipvs/backend.go", "verifyInterval = 10 * time.Second"},
	{"docs/operate/ipvs.md", "needs more than 1,000,000", "backends/ipvs/plan.go", "maxDestinations = 1_000_000"},
	{"docs/operate/ovs.md", "above 4,096 changes there are several", "backends/ovs/dataplane.go", "maxBundle = 4096"},
	{"docs/operate/ovs.md", "Every five seconds, or less often above 2 % of a CPU", "backends/ovs/backend.go", "minPause = 5 * time.Second"},
	{"docs/operate/ovs.md", "an eighth of the 1,048,576 group IDs", "backends/ovs/tables.go", "groupCount = 1 << 20"},
	{"docs/operate/ovs.md", "an eighth of the 1,048,576 group IDs", "backends/ovs/numbers.go", "maxGroups = groupCount / 8"},
	{"docs/operate/ovs.md", "tracks more than 100,000", "backends/ovs/stale.go", "maxListed = 100_000"},
	{"docs/operate/ebpf.md", "Every ten seconds, for at most 2 % of the time", "backends/ebpf/backend.go", "minPause = 10 * time.Second"},
	{"docs/operate/ebpf.md", "can exclude 4,096", "backends/ebpf/exclude.go", "maxCgroupLevels, maxExcluded = 16, 4096"},
	{"docs/operate/nftables.md", "batches of about 2,000 elements", "backends/nftables/backend.go", "return 2_000"},
	{"docs/operate/scale.md", "the default limit of 20,000 connections", "internal/transport/server.go", "DefaultMaxConnections = 20_000"},
	{"docs/operate/security.md", "3 MB of an object, 5,000 lost claims of a service", "remote/wireview.go", "maxObject = 3 << 20"},
	{"docs/operate/security.md", "3 MB of an object, 5,000 lost claims of a service", "remote/wireview.go", "maxLost = 5000"},
	{"docs/reference/conformance.md", "no answer for 300 ms", "conformance/check.go", "answerTimeout = 300 * time.Millisecond"},
}

// TestNumbersInDocs compares sentences of the documentation with constants. If one of the
// constants changes, change the sentence, too.
func TestNumbersInDocs(t *testing.T) {
	t.Chdir(root)
	texts := map[string]string{}
	for _, n := range numbers {
		for _, file := range []string{n.page, n.file} {
			if texts[file] != "" {
				continue
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			texts[file] = words(string(text))
		}
		if !strings.Contains(texts[n.page], n.sentence) {
			t.Errorf("%s no longer has %q: correct the list in this test", n.page, n.sentence)
		}
		if !strings.Contains(texts[n.file], n.code) {
			t.Errorf("%s says %q, but %s no longer has %q", n.page, n.sentence, n.file, n.code)
		}
	}
}

var (
	// quotedPath finds names of files and folders in Markdown. The expression commented finds
	// them in comments. They may end with an exported name, as in backends/nftables.Options.
	quotedPath = regexp.MustCompile("`(\\.?[\\w-]+/[\\w./-]*\\w)`")
	commented  = regexp.MustCompile(`(?:^|[^\w/:.$-])((?:\.?[\w-]+/)+[\w.-]*\w)`)
	goFile     = regexp.MustCompile(`(?:^|[^\w/.-])([\w-]+\.go)\b`) // without a folder
	exported   = regexp.MustCompile(`\.[A-Z]\w*(\.\w+)*$`)
	// placeholder finds words in capital letters, as in results/PART.jsonl.
	placeholder = regexp.MustCompile(`\b[A-Z]{2,}\b`)
)

// TestFilesInDocsExist finds names of files and folders of the repository that do not exist, in
// Markdown and in comments. CHANGELOG.md has names of the past.
func TestFilesInDocsExist(t *testing.T) {
	t.Chdir(root)
	known, tops, bases := map[string]bool{}, map[string]bool{}, map[string]bool{}
	var sources []string
	err := filepath.WalkDir(".", func(name string, entry fs.DirEntry, err error) error {
		name = filepath.ToSlash(name)
		if err != nil || name == "." {
			return err
		}
		if name == ".git" && entry.IsDir() {
			return fs.SkipDir
		}
		known[name] = true
		if entry.IsDir() && !strings.Contains(name, "/") {
			tops[name] = true
		}
		if path.Ext(name) == ".go" {
			sources = append(sources, name)
			bases[path.Base(name)] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	check := func(where, name string) {
		if !strings.Contains(name, "/") && !bases[name] {
			t.Errorf("%s has the name %s, which does not exist", where, name)
		}
		if top, _, _ := strings.Cut(name, "/"); !tops[top] || placeholder.MatchString(name) {
			return
		}
		found++
		file := exported.ReplaceAllString(name, "")
		if !known[file] && !known[path.Join(path.Dir(where), file)] {
			t.Errorf("%s has the name %s, which does not exist", where, name)
		}
	}
	for page, text := range docPages(t) {
		if page == "CHANGELOG.md" {
			continue
		}
		for _, m := range append(quotedPath.FindAllStringSubmatch(text, -1), goFile.FindAllStringSubmatch(text, -1)...) {
			check(page, m[1])
		}
	}
	for _, source := range sources {
		file, err := parser.ParseFile(token.NewFileSet(), source, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, group := range file.Comments {
			text := group.Text()
			for _, m := range append(commented.FindAllStringSubmatch(text, -1), goFile.FindAllStringSubmatch(text, -1)...) {
				check(source, m[1])
			}
		}
	}
	if found < 100 {
		t.Errorf("found only %d names", found)
	}
}

var (
	testName   = regexp.MustCompile(`\b(?:Test|Fuzz|Benchmark)[A-Z]\w*`)
	declared   = regexp.MustCompile(`(?m)^func (?:\([^)]*\) )?((?:Test|Fuzz|Benchmark)\w*)`)
	benchmarks = regexp.MustCompile(`(?m)^.*\bbench ('[^']+'|[\w/$^]+) .*(\./[\w/]+).*$`)
)

// TestTestsInDocsExist finds names in Markdown and in comments that look like names of tests, but
// with which no test's name begins. It also finds commands in Markdown that run no benchmark.
func TestTestsInDocsExist(t *testing.T) {
	t.Chdir(root)
	names := []string{"TestServices"} // in an example
	folders := map[string][]string{}  // names by folder
	comments := map[string]string{}
	err := filepath.WalkDir(".", func(file string, entry fs.DirEntry, err error) error {
		if err != nil || path.Ext(file) != ".go" {
			return err
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		folder := path.Dir(filepath.ToSlash(file))
		for _, m := range declared.FindAllStringSubmatch(string(text), -1) {
			names = append(names, m[1])
			folders[folder] = append(folders[folder], m[1])
		}
		for line := range strings.Lines(string(text)) {
			if _, comment, ok := strings.Cut(line, "// "); ok {
				comments[file] += comment
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(names)
	pages := docPages(t)
	delete(pages, "CHANGELOG.md") // has names of the past
	commands := 0
	for page, text := range pages {
		for _, m := range benchmarks.FindAllStringSubmatch(text, -1) {
			commands++
			folder := path.Clean(m[2])
			if strings.Contains(m[0], "cd test") {
				folder = path.Join("test", folder)
			}
			pattern, _, _ := strings.Cut(strings.Trim(m[1], "'"), "/")
			for one := range strings.SplitSeq(pattern, "|") {
				expression, err := regexp.Compile(one)
				if err != nil {
					t.Errorf("%s: %s: %v", page, m[0], err)
				} else if !slices.ContainsFunc(folders[folder], func(name string) bool { return strings.HasPrefix(name, "Benchmark") && expression.MatchString(name) }) {
					t.Errorf("%s: no benchmark of %s matches %q: %s", page, folder, one, m[0])
				}
			}
		}
	}
	maps.Copy(pages, comments)
	for file, text := range pages {
		for _, name := range testName.FindAllString(text, -1) {
			if i, _ := slices.BinarySearch(names, name); i == len(names) || !strings.HasPrefix(names[i], name) {
				t.Errorf("%s has the name %s, but there is no such test", file, name)
			}
		}
	}
	if commands < 15 {
		t.Errorf("found only %d commands", commands)
	}
}

// TestDependenciesHaveReasons finds requirements of the root module that docs/design.md
// does not explain.
func TestDependenciesHaveReasons(t *testing.T) {
	t.Chdir(root)
	page, err := os.ReadFile("docs/design.md")
	if err != nil {
		t.Fatal(err)
	}
	module, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "| module | used by | why |\n")
	table, _, _ = strings.Cut(table, "\n\n")
	// Some cells contain several modules of one owner, such as "k8s.io/client-go, api".
	names := strings.FieldsFunc(table, func(r rune) bool { return !strings.ContainsRune("-_./", r) && (r < '0' || r > 'z') })
	found := 0
	for _, m := range regexp.MustCompile(`(?m)^\t?(?:require )?([\w.-]+\.[\w.-]+/\S+) v\S+$`).FindAllStringSubmatch(string(module), -1) {
		found++
		if !slices.ContainsFunc(names, func(name string) bool { return m[1] == name || strings.HasSuffix(m[1], "/"+name) }) {
			t.Errorf("docs/design.md gives no reason for %s", m[1])
		}
	}
	if found < 10 {
		t.Errorf("found only %d requirements", found)
	}
}
