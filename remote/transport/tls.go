// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/go-logr/logr"
)

// TLS names the files of mutual TLS, in PEM: both ends prove who they are. The
// files are looked at for each new connection, so that certificates can be renewed
// while a program runs; files that cannot be used leave what was there before.
type TLS struct {
	// CAFile has the authorities by which the other end's certificate must be
	// signed.
	CAFile string
	// CertFile has this end's certificate, and its chain if need be.
	CertFile string
	// KeyFile has its key.
	KeyFile string
	// ServerName is, for a client, the name that the server's certificate must
	// have. Default: the host of its address.
	ServerName string
}

// Server returns the settings of a server. It reads the files, and logs when it
// cannot read them again.
func (t TLS) Server(log logr.Logger) (*tls.Config, error) {
	files := &certFiles{TLS: t, log: log}
	if _, _, err := files.load(); err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{"h2"},
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			cert, pool, err := files.load()
			if err != nil {
				return nil, err
			}
			return &tls.Config{
				MinVersion:             tls.VersionTLS13,
				NextProtos:             []string{"h2"},
				Certificates:           []tls.Certificate{*cert},
				ClientCAs:              pool,
				ClientAuth:             tls.RequireAndVerifyClientCert,
				SessionTicketsDisabled: true, // each connection is checked against the authorities of now
			}, nil
		},
	}, nil
}

// certFiles keeps what the files have, and reads them again when they change.
type certFiles struct {
	TLS
	log logr.Logger

	mu     sync.Mutex
	stamps [3]stamp
	cert   *tls.Certificate
	pool   *x509.CertPool
}

// stamp tells one content of a file from another.
type stamp struct {
	modified time.Time
	size     int64
}

// load returns the certificate and the authorities. The error is that of files
// that could never be used.
func (f *certFiles) load() (*tls.Certificate, *x509.CertPool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	stamps := [3]stamp{stampOf(f.CAFile), stampOf(f.CertFile), stampOf(f.KeyFile)}
	if f.cert != nil && stamps == f.stamps {
		return f.cert, f.pool, nil
	}
	cert, pool, err := f.read()
	switch {
	case err == nil:
		f.cert, f.pool, f.stamps = cert, pool, stamps
	case f.cert == nil:
		return nil, nil, err
	default:
		f.log.Error(err, "The certificates have changed and cannot be used, so the former ones stay")
		f.stamps = stamps
	}
	return f.cert, f.pool, nil
}

func (f *certFiles) read() (*tls.Certificate, *x509.CertPool, error) {
	if f.CAFile == "" || f.CertFile == "" || f.KeyFile == "" {
		return nil, nil, errors.New("TLS needs three files: certificate authorities, a certificate and its key")
	}
	cert, err := tls.LoadX509KeyPair(f.CertFile, f.KeyFile)
	if err != nil {
		return nil, nil, fmt.Errorf("load certificate %s with key %s: %w", f.CertFile, f.KeyFile, err)
	}
	authorities, err := os.ReadFile(f.CAFile)
	if err != nil {
		return nil, nil, fmt.Errorf("read certificate authorities: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(authorities) {
		return nil, nil, fmt.Errorf("%s has no certificate in PEM", f.CAFile)
	}
	return &cert, pool, nil
}

func stampOf(path string) stamp {
	info, err := os.Stat(path)
	if err != nil {
		return stamp{}
	}
	return stamp{info.ModTime(), info.Size()}
}
