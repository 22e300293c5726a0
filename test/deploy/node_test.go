// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
)

// patience is the maximum time to wait for a program.
const patience = 2 * time.Minute

// node is a network namespace in which programs run.
type node struct {
	*netnstest.Namespace
	ended chan string // receives the end of a program
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{netnstest.New(t), make(chan string, 10)}
	n.Up(t, "lo")
	return n
}

// start starts kpng. When the test ends, it stops kpng, which must then exit with code 0.
func (n *node) start(t *testing.T, args ...string) {
	t.Helper()
	var log bytes.Buffer
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = &log, &log
	result, err := n.Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.ended <- fmt.Sprintf("%s: %v", strings.Join(args, " "), <-result)
	}()
	t.Cleanup(func() {
		cmd.Process.Signal(os.Interrupt)
		<-done
		if !cmd.ProcessState.Success() {
			t.Errorf("kpng: %v", cmd.ProcessState)
		}
		if t.Failed() {
			t.Logf("log of %s:\n%s", strings.Join(args, " "), &log)
		}
	})
}

// get returns the body of a page.
func (n *node) get(url string) (string, error) {
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(_ context.Context, network, address string) (c net.Conn, err error) {
			err = n.Do(func() error { c, err = net.Dial(network, address); return err })
			return c, err
		},
	}}
	response, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", response.Status, body)
	}
	return string(body), err
}

// await waits until a page has status 200.
func (n *node) await(t *testing.T, url string) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		_, err := n.get(url)
		if err == nil {
			return
		}
		select {
		case end := <-n.ended:
			t.Fatalf("a program ended: %s", end)
		default:
		}
		if time.Now().After(deadline) {
			t.Fatalf("wait for %s: %v", url, err)
		}
	}
}
