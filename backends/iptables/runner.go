// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/netns"
)

// runner runs the programs of one family. Their input and arguments consist of rules of
// this package, and never pass through a shell.
type runner struct {
	flavour                     flavour
	restoreProgram, saveProgram string
	ipset                       string // empty if sets are not used
	family                      api.Family
	lockWait                    time.Duration
	netNS                       int
	socket                      func(domain, typ, protocol int) (fd int, err error)
	conn                        *netfilter.Conn // the runners of both families share it
	restored                    func(lines int, err error)
	// transactions is the number of transactions of iptables-restore. The runners of both
	// families share it, because they share the generation of nf_tables.
	transactions *uint32
	// lastCounts has the last result of readTable. Only Stats accesses it.
	lastCounts map[string]uint64
}

// programName returns the name of a program of iptables, such as ip6tables-nft-save.
func programName(flavour flavour, family api.Family, action string) string {
	name := "iptables"
	if family == api.IPv6 {
		name = "ip6tables"
	}
	if flavour != flavourDetected {
		name += "-" + flavour.String()
	}
	if action != "" {
		name += "-" + action
	}
	return name
}

// findProgram returns the path of a program. The error names the Debian package that
// contains the program.
func (o *options) findProgram(name, debianPackage string) (string, error) {
	path, err := o.lookPath(name)
	if err != nil {
		return "", fmt.Errorf("find program %s (Debian: apt-get install %s): %w", name, debianPackage, err)
	}
	return path, nil
}

// newRunner finds the programs of a flavour for a family.
func newRunner(opts *options, flavour flavour, family api.Family, ipset string) (*runner, error) {
	restore, err := opts.findProgram(programName(flavour, family, "restore"), "iptables")
	if err != nil {
		return nil, err
	}
	save, err := opts.findProgram(programName(flavour, family, "save"), "iptables")
	if err != nil {
		return nil, err
	}
	return &runner{
		flavour: flavour, restoreProgram: restore, saveProgram: save, ipset: ipset, family: family,
		lockWait: opts.LockWait, netNS: opts.NetNS, socket: opts.socket, restored: opts.Observer.Wrote, transactions: new(uint32),
	}, nil
}

// restore runs iptables-restore. The chains that input does not name stay as they are.
func (r *runner) restore(ctx context.Context, input string) error {
	if input == "" {
		return nil
	}
	seconds := strconv.Itoa(int(r.lockWait / time.Second))
	_, err := r.command(ctx, input, r.restoreProgram, "--noflush", "-w", seconds)
	r.restored(strings.Count(input, "\n"), err)
	if err == nil {
		*r.transactions += uint32(strings.Count(input, "\nCOMMIT\n"))
	}
	var failed *programError
	if errors.As(err, &failed) && failed.locked() {
		return fmt.Errorf("another program has held the lock of iptables (/run/xtables.lock) for %s: %w", r.lockWait, err)
	}
	return err
}

// save returns the output of iptables-save for a table.
func (r *runner) save(ctx context.Context, table string) (string, error) {
	text, err := r.command(ctx, "", r.saveProgram, "-t", table)
	if err == nil && isIncompatible(text) {
		family := map[api.Family]string{api.IPv4: "ip", api.IPv6: "ip6"}[r.family]
		return "", &programError{program: r.saveProgram, message: fmt.Sprintf("table %s has rules that only the program nft understands; find them with nft list table %s %s, and move them to another table", table, family, table)}
	}
	return text, err
}

// isIncompatible reports whether the output of iptables-save has a message in place of
// the rules, because only the program nft understands these rules. In this case, the exit
// code of iptables-save is 0.
func isIncompatible(text string) bool {
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "# Table ") && strings.Contains(line, "is incompatible, use 'nft' tool") {
			return true
		}
	}
	return false
}

// programError is the error of a program that refused to do its work.
type programError struct {
	program string
	code    int
	message string // what the program printed
	line    string // the line of the input that the program refused, if known
}

func (e *programError) Error() string {
	text := fmt.Sprintf("%s: %s", e.program, e.message)
	if e.message == "" {
		text = fmt.Sprintf("%s: exit code %d", e.program, e.code)
	}
	if e.line != "" {
		text += fmt.Sprintf(" (the line is %q)", e.line)
	}
	return text
}

// locked reports whether another program held the lock of iptables for too long. Exit
// code 4 is RESOURCE_PROBLEM in xtables.h of iptables. This exit code has other causes
// too, so locked also checks the message.
func (e *programError) locked() bool {
	return e.code == 4 && strings.Contains(e.message, "xtables lock")
}

// isGeneral reports whether the cause of err certainly is not in the rules of a service.
func isGeneral(err error) bool {
	var failed *programError
	return !errors.As(err, &failed) || failed.locked()
}

// refuses reports whether err means that a program refused a line that contains match.
func refuses(err error, match string) bool {
	var failed *programError
	return errors.As(err, &failed) && strings.Contains(failed.line, match)
}

// lacksPrivileges matches the messages of the programs if the process lacks capabilities.
var lacksPrivileges = regexp.MustCompile(`you must be root|Operation not permitted|Can't open socket to ipset`)

var lineNumber = regexp.MustCompile(`line:? (\d+)`)

// command runs a program and returns its output.
func (r *runner) command(ctx context.Context, input, program string, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &stdout, &stderr
	cmd.WaitDelay = 30 * time.Second // on a busy machine, output may arrive long after the program ended
	var err error
	if nsErr := netns.Do(r.netNS, func() { err = cmd.Run() }); nsErr != nil {
		return "", nsErr
	}
	if err == nil {
		return stdout.String(), nil
	}
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() < 0 {
		return "", fmt.Errorf("run %s: %w", program, err)
	}
	failed := &programError{program: program, code: exit.ExitCode()}
	failed.message = strings.Join(strings.Fields(stderr.String()), " ")
	failed.message = failed.message[:min(len(failed.message), 500)]
	if lacksPrivileges.MatchString(failed.message) {
		failed.message += " (CAP_NET_ADMIN and CAP_NET_RAW are needed)"
	}
	if m := lineNumber.FindStringSubmatch(failed.message); m != nil {
		n, _ := strconv.Atoi(m[1])
		if lines := strings.Split(input, "\n"); n > 0 && n <= len(lines) {
			failed.line = lines[n-1]
		}
	}
	return "", failed
}

// detectFlavour returns the flavour that [flavourDetected] selects.
func detectFlavour(ctx context.Context, opts *options) (flavour, error) {
	hints := regexp.MustCompile(`(?m)^:(KUBE-IPTABLES-HINT|KUBE-KUBELET-CANARY) `)
	rules := map[flavour]int{}
	var found []flavour
	for _, flavour := range []flavour{flavourNFT, flavourLegacy} {
		if _, err := opts.findProgram(programName(flavour, api.IPv4, "save"), "iptables"); err != nil {
			continue
		}
		found = append(found, flavour)
		for _, family := range families {
			save, err := opts.findProgram(programName(flavour, family, "save"), "iptables")
			if err != nil {
				continue
			}
			r := &runner{netNS: opts.NetNS}
			text, err := r.command(ctx, "", save)
			if err != nil {
				if ctx.Err() != nil {
					return 0, err
				}
				continue // the kernel may lack this flavour or IP family, so count no rules
			}
			if hints.MatchString(text) {
				return flavour, nil
			}
			rules[flavour] += strings.Count("\n"+text, "\n-A ")
		}
	}
	switch {
	case len(found) == 0:
		return 0, errors.New("find programs iptables-nft-save and iptables-legacy-save: neither is installed (Debian: apt-get install iptables)")
	case len(found) == 1:
		return found[0], nil
	case rules[flavourNFT] > rules[flavourLegacy]:
		return flavourNFT, nil
	case rules[flavourLegacy] > rules[flavourNFT]:
		return flavourLegacy, nil
	}
	iptables, err := opts.findProgram(programName(flavourDetected, api.IPv4, ""), "iptables")
	if err != nil {
		return flavourNFT, nil
	}
	version, err := (&runner{netNS: opts.NetNS}).command(ctx, "", iptables, "-V")
	if err == nil && strings.Contains(version, "legacy") {
		return flavourLegacy, nil
	}
	return flavourNFT, nil
}
