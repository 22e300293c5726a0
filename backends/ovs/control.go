// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/kpng-project/kpng/backends/ovs/internal/openflow"
	"k8s.io/klog/v2"
)

// maxAnswerTime limits the time until ovs-vswitchd has answered a command, and maxAnswer
// limits the size of the answer.
const (
	maxAnswerTime = 5 * time.Second
	maxAnswer     = 1 << 26
)

// commitAndWait sends messages as one bundle and waits until the datapath follows the
// changed flows. The entries of the datapath are decisions for packets that it has seen.
// After a bundle, the switch checks all of them. OpenFlow has no message to wait for that,
// so commitAndWait uses the control socket of ovs-vswitchd. If that fails, packets may
// follow the old flows for up to a second after Sync has returned. commitAndWait logs the
// first such failure.
func (d *dataplane) commitAndWait(ctx context.Context, messages []openflow.Message) error {
	// The switch also checks its entries twice a second. If the request came after the bundle,
	// it would often wait for such a check.
	checked := revalidation(ctx, d.opts.RunDir)
	if err := d.conn.Commit(ctx, messages); err != nil {
		return err
	}
	var err error
	select {
	case err = <-checked: // the answer came before the end of the bundle
		if err == nil {
			err = <-revalidation(ctx, d.opts.RunDir)
		}
	default:
		err = <-checked
	}
	if err != nil && !d.cannotWait && ctx.Err() == nil {
		d.cannotWait = true
		klog.FromContext(ctx).Error(err, "Cannot wait until the datapath follows changed flows", "bridge", d.opts.Bridge)
	}
	return nil
}

// revalidation sends the command revalidator/wait to ovs-vswitchd. The result gets the
// answer, which the switch sends after its next check of all entries.
func revalidation(ctx context.Context, dir string) <-chan error {
	result := make(chan error, 1)
	conn, err := callControl(ctx, dir, "revalidator/wait")
	if err != nil {
		result <- err
		return result
	}
	go func() {
		_, err := readAnswer(conn)
		result <- err
	}()
	return result
}

// control executes a command of ovs-vswitchd and returns its answer.
func control(ctx context.Context, dir, command string, args ...string) (string, error) {
	conn, err := callControl(ctx, dir, command, args...)
	if err != nil {
		return "", err
	}
	return readAnswer(conn)
}

// callControl sends a command to the control socket of ovs-vswitchd. It returns the
// connection for readAnswer.
func callControl(ctx context.Context, dir, command string, args ...string) (net.Conn, error) {
	pid, err := os.ReadFile(filepath.Join(dir, "ovs-vswitchd.pid"))
	if err != nil {
		return nil, err
	}
	request, err := json.Marshal(map[string]any{"id": 0, "method": command, "params": append([]string{}, args...)})
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, "ovs-vswitchd."+strings.TrimSpace(string(pid))+".ctl")
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	err = conn.SetDeadline(time.Now().Add(maxAnswerTime))
	if err == nil {
		_, err = conn.Write(request)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// readAnswer returns the answer of ovs-vswitchd to a command, and closes the connection.
func readAnswer(conn net.Conn) (string, error) {
	defer conn.Close()
	var answer struct {
		Result string
		Error  any
	}
	if err := json.NewDecoder(io.LimitReader(conn, maxAnswer)).Decode(&answer); err != nil {
		return "", fmt.Errorf("read answer of ovs-vswitchd: %w", err)
	}
	if answer.Error != nil {
		return "", fmt.Errorf("ovs-vswitchd: %v", answer.Error)
	}
	return answer.Result, nil
}
